"""`python -m fl_privacy` is `fl-privacy`."""

from fl_privacy.cli import main

main()
