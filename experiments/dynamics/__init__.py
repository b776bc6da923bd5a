"""The paper's two analyses of flows and ordinary layers: spectra over layer-time, and token scores from exponents."""
