"""What depth does: spectra, Lyapunov exponents and trajectories of a model, as arrays, figures and one HTML page.

Import the modules themselves: `from qkvflow.analysis import spectral, lyapunov, trajectory`.
"""
