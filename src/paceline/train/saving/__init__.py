"""What a checkpoint holds, how a run resumes from it, and what must not change."""
