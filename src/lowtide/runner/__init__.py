"""What stands behind `lowtide run`: the program as Python runs it, its steps found, what is said at exit."""
