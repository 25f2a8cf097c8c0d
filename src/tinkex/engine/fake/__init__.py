"""An engine whose model is one table of numbers: exact, quick, and the same bits every time."""
