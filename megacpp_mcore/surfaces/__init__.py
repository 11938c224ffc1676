"""The places in the model where more than one implementation fits, and what serves each.

One module a surface; it alone names the surface's backends. `registry` lists the modules.
"""
