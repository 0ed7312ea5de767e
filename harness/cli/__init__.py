"""What the user types, a function for each verb; heavy imports wait until it is called."""
