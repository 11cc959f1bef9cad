"""The pieces that `jtrain.profile.report` puts a page together from: markup, charts, style and script."""
