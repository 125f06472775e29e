"""Turn raw data into token stores, look at them, and move them between formats."""
