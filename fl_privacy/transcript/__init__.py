"""What each party could see: written by that party, read by attacks, verified by anyone with the CA's certificate."""

from fl_privacy.transcript.read import open_run
from fl_privacy.transcript.verify import verify
from fl_privacy.transcript.write import RunWriter, ViewWriter

__all__ = ["RunWriter", "ViewWriter", "open_run", "verify"]
