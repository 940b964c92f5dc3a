"""What attacks share: the protocol, what an attacker observes and knows, the truth of a run, measures, the replay."""
