"""One file per architecture, and the checkpoint reader."""
