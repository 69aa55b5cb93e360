"""Implementation of `lowtide run`: run the script, find its training steps, print a summary at exit."""
