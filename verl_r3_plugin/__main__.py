"""`python -m verl_r3_plugin` is `verl-r3`."""

from .cli import main

main()
