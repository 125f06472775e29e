"""Rollouts: prompts are answered by the model that trains, and the answers become its rows."""
