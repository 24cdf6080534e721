"""The making of the demo model, stage by stage; `python/train_demo.py` is its command line."""
