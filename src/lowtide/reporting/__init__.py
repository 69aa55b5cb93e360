"""What happened, as records that print themselves. Imports no torch."""
