"""The kinds of problems that need code: functions that add the steps to a draft and return the text."""
