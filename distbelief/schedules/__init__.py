"""Schedules: how an algorithm moves what ranks hold, as data; with a proof, a price, a drawing. No bytes move here."""
