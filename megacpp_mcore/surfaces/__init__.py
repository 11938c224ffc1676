"""The places in the model where more than one implementation fits, and what serves each."""
