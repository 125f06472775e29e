"""Jobs over ssh: hosts and their connections here, an agent on every host there."""
