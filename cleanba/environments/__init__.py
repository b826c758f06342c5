"""What is acted in: how environments look, how they are made and stepped."""
