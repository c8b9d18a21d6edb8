"""What is loaded into disturbed processes: ``sitecustomize`` for those that a launcher starts."""
