"""`qerl export`: a run or an adapter as a folder to serve or publish."""
