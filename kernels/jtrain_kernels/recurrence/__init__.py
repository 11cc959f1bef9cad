"""Parts that recurrent ops share: documents of packed rows, chunks, and rows split over devices."""
