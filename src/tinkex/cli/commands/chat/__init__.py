"""`tinkex chat`: input, conversation state and streamed replies."""
