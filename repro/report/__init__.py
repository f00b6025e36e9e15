"""What is drawn and what is judged. No experiment is known here.

plotting/   how every figure is drawn, in one style
diagrams    block tables, drawn
embedding   what a figure carries: the hashes of its rows, parameters and code
page        the page of findings, figures and verdicts; views, findings and ledger_rows are its parts
notebooks   executed notebooks as HTML
claims/     the claims, our judgements of them, and the ledger
paper/      the paper's own curves"""
