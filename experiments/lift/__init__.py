"""A trained model as a flow with fewer weights, before and after healing, beside the same model with layers dropped."""
