"""`python -m moonpool` is `moonpool`."""

from moonpool.cli import main

main()
