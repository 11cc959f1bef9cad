"""Commands of `jtrain plan` besides the plan itself: money, the network, pipelines and walls."""
