"""What a run keeps on disk, and how it continues from there."""
