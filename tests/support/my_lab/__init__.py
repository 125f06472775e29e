"""What a user keeps outside the package: an objective, a family and a tracker of their own."""
