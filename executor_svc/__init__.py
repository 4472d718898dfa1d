"""Runs a model on one device. Knows plans, blocks and tensors; decides no policy and forgets a sequence after its last step."""
