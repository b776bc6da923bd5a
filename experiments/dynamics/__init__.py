"""The paper's two analyses on flows and ordinary layers: spectra over layer-time, and tokens that exponents mark."""
