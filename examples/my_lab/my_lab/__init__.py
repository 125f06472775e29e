"""Things that headway does not have, in a package of one's own."""
