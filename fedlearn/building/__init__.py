"""How the pieces of a run are made, an idea a module; :mod:`fedlearn.build` is the way in."""
