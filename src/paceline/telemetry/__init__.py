"""How a run looks from outside while it trains: heartbeats, phases of a step, stragglers, pulses."""
