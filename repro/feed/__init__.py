"""An engine that is fed while it runs, whatever its executor is.

driver       one thread that steps an engine; others hand it work between two iterations
feed         requests that join and are taken back
handle       their pieces and results, for threads and for asyncio
receipt      where one request's time went, as a sum of causes
receipts     an observer that says it of every request of a run
standstills  when a queue stood still, and whose end let it move
stop_texts   texts that end an output, looked for as it grows"""
