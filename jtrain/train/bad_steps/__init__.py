"""Bad steps: updates that are not applied, replays, and the noise that they may show."""
