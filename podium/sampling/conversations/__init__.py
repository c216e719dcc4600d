"""Conversations between the engine and environments: turns, partial episodes, replays."""
