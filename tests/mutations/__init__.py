"""Mistakes that a colleague could make, put into the code one at a time: does the suite catch each of them?"""
