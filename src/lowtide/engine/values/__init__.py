"""Values, the recipes that recompute them, the handles that autograd holds, and replay."""
