"""`tinkex chat`: a module for each of its concerns."""
