"""One thin function per verb."""
