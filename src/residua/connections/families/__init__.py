"""What several schemes are built on."""
