"""What poisoned sites achieve, and what a defence does about them."""
