"""Mutations: mistakes put into the code one at a time, in a file for each subject. Does the suite catch each one?"""
