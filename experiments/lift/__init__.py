"""A trained model as a flow with fewer weights, before and after healing, against the model with dropped layers."""
