"""What the numbers become when a run is spread over ranks. Pure arithmetic."""
