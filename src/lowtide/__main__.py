"""`python -m lowtide` is the command `lowtide`."""

from .cli import main

main(prog_name="lowtide")
