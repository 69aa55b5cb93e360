"""What stands behind `lowtide.fit`: steps, kinds of steps, their plans, and the model's state. Public calls: `_fit`."""
