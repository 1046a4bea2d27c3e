"""Robustness: is a changed model still kin of what it was made from, and a stranger of all others?"""
