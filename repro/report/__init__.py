"""What is drawn and what is judged: plots, diagrams, the page, the claims and the paper's own curves."""
