"""Scheduling: who may enter, who goes next, who has a slot. Pure: it takes `now` and events and returns what to do."""
