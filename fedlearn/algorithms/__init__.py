"""The composable pieces of a round: frozen values with pure methods, no I/O."""
