"""The parts of the oracle `python/gen_model_ref.py`; nothing of the package is imported here."""
